"""The command line: parses arguments, then calls one command."""
