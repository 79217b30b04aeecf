"""Command line: one module per subcommand. Besides `Job` the only reader of the environment."""
