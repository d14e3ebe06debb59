"""The shell: parser, flags, one file a command. Nothing imports it."""
