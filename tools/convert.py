"""``trace-megatron convert``, for those who look among the tools.

python tools/convert.py hf-to-megatron SRC DST --tp 2 --pp 2
python tools/convert.py megatron-to-hf SRC DST
"""

import sys

from trace_megatron.cli import main

if __name__ == "__main__":
    sys.argv = ["trace-megatron", "convert", *sys.argv[1:]]
    main()
