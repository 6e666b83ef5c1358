"""Run the controller in other libraries' training loops; each module needs the library that it is named after."""
