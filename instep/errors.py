"""The one way in which wrong input is reported."""


class InputError(Exception):
    """Something that the user gave cannot be used.

    The message is one line: what was found, what was expected, where, and what to do. The command line
    prints it without a traceback and exits with code 2; nothing is left half-written.
    """


class TrainingError(Exception):
    """A run cannot go on (three bad batches in a row, a failing reward, a lost engine). Exit code 1."""
