# Fails if an object file defines a weak symbol. -DNM: GNU or LLVM nm; -DOBJECTS: the files, a list.

foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND "${NM}" -C --defined-only "${object}" OUTPUT_VARIABLE symbols RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "${NM} can't read ${object}: ${failed}")
  endif()
  string(REGEX MATCHALL "[^\n]* [VWu] [^\n]*" weak "${symbols}")
  list(FILTER weak EXCLUDE REGEX " DW\\.ref\\.")  # a pointer, not code
  if(weak)
    string(REPLACE ";" "\n" weak "${weak}")
    message(FATAL_ERROR "${object} defines symbols that the linker may take for those of other files:\n${weak}")
  endif()
endforeach()
