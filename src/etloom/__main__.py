"""python -m etloom"""

import sys

from etloom.cli import main
from etloom.core.native_part import check_native_part

try:
    check_native_part()
except ImportError as error:
    sys.exit(f"etloom: {error}")
sys.exit(main())
