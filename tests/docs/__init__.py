"""What the pages in docs/ are made from and checked against."""
