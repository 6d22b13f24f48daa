"""The cases: each measures something, prints it as a table, and has a command of its own. Every module here is one."""
