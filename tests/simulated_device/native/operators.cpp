// Every operator runs the CPU's kernel later, on the thread of its stream. Shapes of results are known at once, from
// torch's meta kernels.
#include "operators.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <mutex>
#include <optional>
#include <set>

#include "memory.h"
#include "streams.h"

namespace simulated {

using c10::IValue;
using torch::jit::Stack;

namespace {

at::Tensor like(const at::Tensor& tensor, c10::Device device) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(device);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

// Applies `change` to each tensor that the value has.
template <class Change>
IValue map_tensors(const IValue& value, Change change) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& each : value.toTensorVector()) changed.push_back(each.defined() ? change(each) : each);
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (std::optional<at::Tensor> each : value.toOptionalTensorVector())
      changed.push_back(each && each->defined() ? std::optional<at::Tensor>(change(*each)) : each);
    return changed;
  }
  return value;
}

std::mutex& calls_mutex = *new std::mutex;
std::map<std::string, Calls>& calls_made = *new std::map<std::string, Calls>;

void note_call(const std::string& name, bool waited) {
  std::lock_guard<std::mutex> lock(calls_mutex);
  (waited ? calls_made[name].waited : calls_made[name].all)++;
}

// Operators whose results have shapes that depend on values, or whose meta kernels return others than the CPU's kernels.
bool needs_values(const std::string& name) {
  static const auto& names = *new std::set<std::string>{
      "aten::equal",       "aten::nonzero",            "aten::masked_select", "aten::_unique2",
      "aten::unique_dim",  "aten::unique_consecutive", "aten::bincount",      "aten::repeat_interleave",
      "aten::is_nonzero",  "aten::native_batch_norm"};
  return names.count(name) > 0;
}

// Whether an operator takes an argument from the host, as CUDA's kernels do: indices of x[i], and single elements where
// torch does not compare the devices of arguments itself but leaves it to TensorIterator, which takes them.
bool taken_from_host(const c10::OperatorHandle& op, const c10::Argument& argument, const at::Tensor& tensor) {
  static const auto& indexing =
      *new std::set<std::string>{"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};
  static const auto& unchecked = *new std::set<std::string>{
#include "no_device_check.inl"
  };
  const auto& name = op.schema().operator_name();
  if (indexing.count(name.name) && argument.name() == "indices") return true;
  if (tensor.dim() > 0 || argument.name() == "index" || argument.name() == "mask") return false;
  return name.name.rfind("aten::", 0) != 0 || unchecked.count(c10::toString(name));
}

// Lets the host's generator go on from a device's, since the CPU's kernels draw from it.
class Drawing {
 public:
  explicit Drawing(at::Generator from) : from_(std::move(from)), lock_(mutex()) {
    before_ = host().get_state();
    host().set_state(from_.get_state());
  }
  ~Drawing() {
    from_.set_state(host().get_state());
    host().set_state(before_);
  }

 private:
  static std::mutex& mutex() {
    static auto& found = *new std::mutex;
    return found;
  }
  static at::Generator& host() {
    static auto& found = *new at::Generator(at::detail::getDefaultCPUGenerator());
    return found;
  }
  at::Generator from_;
  std::lock_guard<std::mutex> lock_;
  at::Tensor before_;
};

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), name_(schema_.operator_name().name),
        arguments_(stack->end() - schema_.arguments().size(), stack->end()) {
    find_device();
    check_arguments();
    note_call(name_, false);
  }

  Stack run() {
    c10::DeviceGuard guard(c10::Device(TYPE, device_));
    return shapes_are_known() ? run_later() : run_now();
  }

 private:
  void find_device() {
    for (auto& each : arguments_) {
      if (each.isDevice() && each.toDevice().type() == TYPE && device_ < 0)
        device_ = each.toDevice().index() < 0 ? current_device() : each.toDevice().index();
      map_tensors(each, [&](const at::Tensor& tensor) {
        if (on_device(tensor)) {
          TORCH_CHECK(device_ < 0 || device_ == tensor.device().index(), name_,
                      ": Expected all tensors to be on the same device, but found number ", device_, " and ",
                      tensor.device());
          device_ = tensor.device().index();
        }
        return tensor;
      });
    }
    TORCH_CHECK(device_ >= 0, "simulated: ", name_, " without a device");
  }

  void check_arguments() {
    for (size_t i = 0; i < arguments_.size(); i++) {
      const auto& argument = schema_.arguments()[i];
      if (arguments_[i].isGenerator()) {
        generator_ = arguments_[i].toGenerator();
        arguments_[i] = IValue();
      }
      random_ = random_ || argument.name() == "generator" || argument.name() == "rng_state";
      has_out_ = has_out_ || argument.is_out();
      const bool writes = argument.alias_info() && argument.alias_info()->isWrite();
      map_tensors(arguments_[i], [&](const at::Tensor& tensor) {
        TORCH_CHECK(on_device(tensor) || (!writes && taken_from_host(op_, argument, tensor)),
                    "Expected all tensors to be on the same device, but got ", argument.name(), " is on ",
                    tensor.device(), ", different from other tensors on ", c10::Device(TYPE, device_),
                    " (when checking argument in method ", name_, ")");
        return tensor;
      });
    }
    random_ = random_ || name_ == "aten::native_dropout";
  }

  // Tries torch's meta kernel. Afterwards `results_like_` and the sizes of out= arguments are known.
  bool shapes_are_known() {
    bool new_tensors = false, others = false;
    for (auto& each : schema_.returns()) {
      new_tensors = new_tensors || !each.alias_info();
      const auto kind = each.type()->kind();
      others = others || (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType);
    }
    if (others || random_ || needs_values(name_)) return false;
    if (!new_tensors && !has_out_) return true;
    const c10::Device meta(at::kMeta);
    Stack stack;
    for (auto& each : arguments_)
      stack.push_back(each.isDevice() ? IValue(meta)
                                      : map_tensors(each, [&](const at::Tensor& tensor) { return like(tensor, meta); }));
    const Stack given(stack);
    try {
      op_.callBoxed(stack);
    } catch (const std::exception&) {
      return false;  // there is no such kernel, or the arguments are wrong, as the CPU's kernel will say
    }
    for (size_t i = 0; i < arguments_.size(); i++)
      if (is_out(i)) {
        auto out = arguments_[i].toTensor();
        resize_to(out, given[i].toTensor().sizes());
      }
    results_like_ = stack;
    return true;
  }

  bool is_out(size_t i) const { return schema_.arguments()[i].is_out() && arguments_[i].isTensor(); }

  Stack arguments_for_kernels() const {
    Stack found;
    for (auto& each : arguments_)
      found.push_back(each.isDevice() ? IValue(c10::Device(at::kCPU))
                                      : map_tensors(each, [](const at::Tensor& tensor) {
                                          return on_device(tensor) ? for_kernels(tensor) : tensor.clone();
                                        }));
    return found;
  }

  // The argument that a return is, as with operators that work in place.
  const IValue& argument_returned(size_t which) const {
    const auto* info = schema_.returns()[which].alias_info();
    for (size_t i = 0; i < arguments_.size(); i++) {
      const auto* of_argument = schema_.arguments()[i].alias_info();
      if (of_argument && of_argument->beforeSets() == info->beforeSets()) return arguments_[i];
    }
    TORCH_CHECK(false, "simulated: ", name_, " returns a view and has no kernel of its own");
  }

  Stack run_later() {
    Stack results, targets;
    for (size_t i = 0; i < schema_.returns().size(); i++) {
      if (schema_.returns()[i].alias_info()) {
        results.push_back(argument_returned(i));
        targets.emplace_back();
        continue;
      }
      const c10::Device device(TYPE, device_);
      results.push_back(map_tensors(results_like_[i], [&](const at::Tensor& tensor) { return like(tensor, device); }));
      targets.push_back(map_tensors(results.back(), for_kernels));
    }
    launch(current_stream(device_), [op = op_, stack = arguments_for_kernels(), targets]() mutable {
      op.callBoxed(stack);
      for (size_t i = 0; i < targets.size(); i++) {
        if (targets[i].isTensor() && targets[i].toTensor().defined())
          targets[i].toTensor().copy_(stack[i].toTensor());
        else if (targets[i].isTensorList())
          for (size_t k = 0; k < targets[i].toTensorVector().size(); k++)
            if (auto target = targets[i].toTensorVector()[k]; target.defined())
              target.copy_(stack[i].toTensorVector()[k]);
      }
    });
    return results;
  }

  Stack run_now() {
    note_call(name_, true);
    count_launch();
    const auto stream = current_stream(device_);
    Stack stack = arguments_for_kernels();
    for (size_t i = 0; i < arguments_.size(); i++)
      if (is_out(i)) stack[i] = at::empty({0}, stack[i].toTensor().options());
    const Stack given(stack);
    run_and_wait(stream, [&] {
      std::optional<Drawing> drawing;
      if (random_)
        drawing.emplace(generator_ ? *generator_ : at::detail::getPrivateUse1Hooks().getDefaultGenerator(device_));
      op_.callBoxed(stack);
    });
    auto fill = [&](const at::Tensor& target, const at::Tensor& values) {
      run_and_wait(stream, [to = for_kernels(target), values] { to.copy_(values); });
    };
    for (size_t i = 0; i < arguments_.size(); i++)
      if (is_out(i)) {
        auto out = arguments_[i].toTensor();
        resize_to(out, given[i].toTensor().sizes());
        fill(out, given[i].toTensor());
      }
    Stack results;
    for (size_t i = 0; i < schema_.returns().size(); i++) {
      if (schema_.returns()[i].alias_info()) {
        results.push_back(argument_returned(i));
        continue;
      }
      results.push_back(map_tensors(stack[i], [&](const at::Tensor& values) {
        auto made = like(values, c10::Device(TYPE, device_));
        fill(made, values);
        return made;
      }));
    }
    return results;
  }

  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  const std::string& name_;
  Stack arguments_;
  Stack results_like_;
  int device_ = -1;
  bool random_ = false, has_out_ = false;
  std::optional<at::Generator> generator_;
};

void any_operator(const c10::OperatorHandle& op, Stack* stack) {
  Stack results = Call(op, stack).run();
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (auto& each : results) stack->push_back(std::move(each));
}

}  // namespace

std::map<std::string, Calls> calls() {
  std::lock_guard<std::mutex> lock(calls_mutex);
  return calls_made;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>());
}

}  // namespace simulated
