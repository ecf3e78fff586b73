"""Results for people: a table, a verdict, figures, and one page that holds them all."""
