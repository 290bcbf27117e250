"""`python -m unidle.cli`"""

from unidle.cli.main import main

main()
