from trope.cli import main

main()
