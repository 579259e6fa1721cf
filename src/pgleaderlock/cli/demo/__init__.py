"""`pgleaderlock demo`: `command` plays the scenes on a `cluster` of `node` processes, `screen` shows them.

Rule: nothing that was started here is left behind; `janitor` sees to that whatever the end was.
"""
