"""`python -m patchguard`, also under torchrun."""

from patchguard.cli import main

if __name__ == "__main__":
    main()
