"""`python -m agentcompact_cli` is the `agentcompact` command."""

from agentcompact_cli.main import main

if __name__ == "__main__":
    main()
