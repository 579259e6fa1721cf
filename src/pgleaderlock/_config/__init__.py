"""Settings, in two forms: what the user wrote, and the frozen value that the code runs on.

The user writes keywords, or a file (`toml`), environment variables and flags. `load` reads these by the table of
settings (`schema`) into values that record their origin; `durations` parses a duration. The frozen values are `Timing`
(in `_election.settings.Setup`, with the other settings of an election) and `LockTiming`. `timing` holds every relation
between settings and every formula that derives one from another.

Rule: a mistake is reported with its place and its remedy, before anything is opened.
"""
