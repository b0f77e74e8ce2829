build-native:
	cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE=$(CURDIR)/.venv/bin/python -DCMAKE_BUILD_TYPE=Release -DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$(CURDIR)/etloom > /dev/null
	cmake --build build/dev
