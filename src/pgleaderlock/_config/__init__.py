"""Settings, in two forms: what the user wrote, and the frozen value that the code runs on.

What was written is keywords, or a file (`toml`), the environment and flags, which `load` reads by the table of settings
(`schema`) into values that know their origin; `durations` reads a time. The frozen values are `Timing`, with everything
else of an election in `_election.settings.Setup`, and `LockTiming`. `timing` holds every relation between settings and
every formula that derives one from another.

Rule: a mistake is reported with its place and its remedy, before anything is opened.
"""
