"""The report page: one HTML file with inline SVG charts."""
