"""``python -m pipedec.cli``, for the detached cluster process."""

from pipedec.cli.main import main

main()
