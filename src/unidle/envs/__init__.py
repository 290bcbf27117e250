"""What is stepped: environments in this process or in workers, behind one interface."""
