"""Seeded worlds that run the real deciders under faults. Nothing real happens here.

A world has one controller process (now and then two), one agent per machine, its workers, and
channels, links, disk and time made up from the seed. Real: the three deciders. Made up: everything
they command. Not covered: threads, sockets, tensors, partial frames (drills do that), state that a
collective behind the gate has spoilt, machines that differ, and prediction.
"""
