"""What streams can do beyond the basics: joins, firsts and patterns. They only draw the graph."""
