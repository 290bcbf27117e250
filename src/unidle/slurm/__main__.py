"""`python -m unidle.slurm`: see `supervisor`."""

import sys

from unidle.slurm.supervisor import main

sys.exit(main())
