"""`python -m pase`: the command line."""

from pase.cli.main import main

if __name__ == "__main__":
    main()
