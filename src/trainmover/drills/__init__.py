"""Real processes with injected faults: scenarios, their runner, what restarting costs instead."""
