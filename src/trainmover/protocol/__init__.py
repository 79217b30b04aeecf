"""The only vocabulary between processes: messages, gate flags, journal records, exit codes."""
