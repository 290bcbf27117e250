"""Lets every test import the little environments that stand beside this file, and keeps two workers off each other's cores."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported anywhere
sys.path.insert(0, str(Path(__file__).parent))
