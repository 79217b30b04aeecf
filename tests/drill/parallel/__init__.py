"""Every kind of parallelism in real jobs."""
