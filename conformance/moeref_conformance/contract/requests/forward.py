"""What the facet `forward` is asked for."""

from __future__ import annotations

import re

#: By what the weights of the last layer are multiplied where they have changed. A power of two, which a division takes
#: back; and not -1, of which an attention has two that cancel.
FACTOR = -2.0
#: Names of what is left as it is there, Megatron's and the checkpoint's: vectors, which may be held less 1.
KEPT = re.compile("norm|bias|A_log")
