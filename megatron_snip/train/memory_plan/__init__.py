"""Plans of what each block keeps for backward: their file, measurements and the integer program."""
