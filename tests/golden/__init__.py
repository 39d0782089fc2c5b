"""A record of behaviour: what the program answers, when, over which processes and with which face, written down in ``records``.

``python -m golden`` (``make golden``) makes it, ``test_golden.py`` compares. A part is a module, whose ``make`` gives plain JSON
values by the name of the case.
"""
