"""Below everything: the clock, event-loop helpers, structured logging and the version.

Nothing here knows of locks, of PostgreSQL or of HTTP. Rule: import the standard library only.
"""
