"""`python -m trainmover.cli`, for hosts where the console script is not on the path."""

import sys

from trainmover.cli.app import main

sys.exit(main())
