"""Speed and memory, one question a script; nothing is reported on a wrong result."""
