"""`pgleaderlock exec` and `lock exec`: a command that runs only while this node leads.

`command` reads the options, `one_run` leads in one of three ways (lock, election, lock server) and runs the command
once, `supervise` keeps its process group. Rule: the command never outlives its leadership.
"""
