"""The text tests of this folder share text_tokenizers.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
