"""What a command line runs: the mains of the scripts in tools/, which the installed package has too."""
