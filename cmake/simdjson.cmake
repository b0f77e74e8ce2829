# The target simdjson::simdjson: the system's library (3.0.1 of Debian 12 is enough), else a pinned release.
# No version is asked for, since find_package would refuse every major version but that one; 5.0.2 works too.
find_package(simdjson CONFIG QUIET)
if(simdjson_FOUND AND simdjson_VERSION VERSION_GREATER_EQUAL 3.0)
  return()
endif()

set(release v3.12.3)
set(sha256 d0af071f2f4187d8b26b556e83ef832b634bd5feb4e2f537b9dabbd334d4e334)
set(archive "${CMAKE_BINARY_DIR}/simdjson-${release}.tar.gz")

include(FetchContent)
if(NOT FETCHCONTENT_SOURCE_DIR_SIMDJSON)
  message(STATUS "etloom: no system simdjson; fetching ${release}")
  # Fetched here rather than by FetchContent, whose own message for a failure is a page long.
  file(DOWNLOAD "https://github.com/simdjson/simdjson/archive/refs/tags/${release}.tar.gz" "${archive}"
       EXPECTED_HASH SHA256=${sha256} INACTIVITY_TIMEOUT 30 STATUS status)
  if(NOT status MATCHES "^0;")
    list(GET status 1 reason)
    message(FATAL_ERROR "etloom: no simdjson, and ${release} could not be fetched (${reason}): install libsimdjson-dev "
                        "(Debian, Ubuntu), simdjson-devel (Fedora) or simdjson (Homebrew)")
  endif()
endif()
# No CMakeLists.txt of theirs is run: the release holds the whole library as one source file.
FetchContent_Declare(simdjson URL "${archive}" URL_HASH SHA256=${sha256} SOURCE_SUBDIR singleheader/none)
if(POLICY CMP0135)
  cmake_policy(SET CMP0135 NEW)
endif()
FetchContent_MakeAvailable(simdjson)
add_library(etloom_simdjson STATIC "${simdjson_SOURCE_DIR}/singleheader/simdjson.cpp")
target_include_directories(etloom_simdjson SYSTEM PUBLIC "${simdjson_SOURCE_DIR}/singleheader")
target_link_libraries(etloom_simdjson PUBLIC Threads::Threads)
add_library(simdjson::simdjson ALIAS etloom_simdjson)
