"""What commands print: results in words, tables and JSON, apart from the work that they report."""
