"""python -m kvplan"""

import sys

from .cli import main

sys.exit(main())
