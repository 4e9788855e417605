from trope.cli.main import main

main()
