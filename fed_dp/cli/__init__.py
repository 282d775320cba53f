"""The command line: parse, call, print. Heavy imports wait until a command needs them."""
