# docker build -t etloom . && docker run --rm -v "$PWD:/work" etloom findings run/
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends build-essential git && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml CMakeLists.txt README.md CHANGELOG.md LICENSE /source/
COPY cmake /source/cmake
COPY native /source/native
COPY src /source/src
RUN pip wheel --no-cache-dir --wheel-dir /wheels /source

FROM python:3.12-slim
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index --find-links /wheels etloom && useradd --create-home etloom
USER etloom
WORKDIR /work
ENTRYPOINT ["etloom"]
