"""`pgleaderlock demo`: `command` plays the scenes on a `cluster` of `node` processes, `screen` shows them.

Rule: nothing that the demo has started is left behind; `janitor` cleans up however the demo ends.
"""
