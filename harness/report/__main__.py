"""`python -m harness.report`."""

import sys

from harness.report import main

sys.exit(main())
