"""The `agentcompact` command: one file a subcommand."""
