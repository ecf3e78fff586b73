"""Random hostile input: configs, options, tables, arrays, tampered folders, uploads."""
