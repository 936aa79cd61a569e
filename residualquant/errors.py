"""The one exception that users see.

The library raises ``ValueError`` for bad arguments.  What stops a command (a missing file, a foreign checkpoint, a
missing GPU) is a :class:`ResidualQuantError`: one sentence that says what is wrong and what to do about it.
"""


class ResidualQuantError(Exception):
    """A problem that one sentence explains; the command line prints it and exits with code 2."""
