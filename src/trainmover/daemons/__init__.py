"""Thin processes around the deciders: receive, decide, journal, act.

`loop` is the one way a decider is driven. `controller_daemon`, `agent_daemon` and `supervisor` are
processes; `run_directory` and `settings` are what they and the command line share.
"""
