"""The only room, with `daemons`, that touches clock, socket, process and disk.

Decides nothing about the job: links, journal file, launcher, probes and fault injection carry out
what deciders ask for and turn what happens into events. Imports here stay light: a worker takes
`edges.faults` and `edges.clock` without asyncio.
"""
