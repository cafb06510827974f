"""`python -m tritonemb`."""

import sys

from tritonemb.cli import main

sys.exit(main())
