"""python -m etloom"""

import sys

from etloom.cli import main

sys.exit(main())
