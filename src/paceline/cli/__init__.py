"""The command line: parse, then call one command."""
