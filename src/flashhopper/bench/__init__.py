"""``flashhopper bench``: this package and its peers measured side by side, and what is written down about it."""


class BenchError(Exception):
    """What the user can mend: no Hopper GPU, a missing file, a bad argument. Printed as one line, no traceback."""
